"""The words the text-to-SQL generator builds schemas from: 40 tables, 48 number and 32 text columns, 48 values.

All are plain lower-case words, so that a word-level vocabulary of a few hundred tokens holds every one. No word
is in two lists, and none is an SQL keyword.
"""

from __future__ import annotations

_TABLES = """
shop farm hotel school museum library bridge station airport stadium theater clinic factory harbor garden
bakery market club team player singer author painter pilot driver doctor lawyer student teacher employee
customer supplier product film song book train ship aircraft festival
"""

_NUMBER_COLUMNS = """
price stock age height weight salary budget score rank capacity length width depth speed distance duration
population area rooms floors seats pages votes goals points wins losses visitors members tickets sales profit
cost tax rating level power volume debt bonus orders branches awards tracks stops crew staff years
"""

_TEXT_COLUMNS = """
name city country color style genre status title region street brand material language nationality
category season owner manager sponsor label origin theme position currency district climate size shape
grade mood format religion
"""

_VALUES = """
red blue green white black amber oslo paris rome cairo lima tokyo anna boris clara david emma felix
north south east west alpha beta gamma delta gold silver iron wood glass stone rock jazz folk opera
open closed active retired spring summer autumn winter small medium large huge
"""

TABLES = tuple(_TABLES.split())
NUMBER_COLUMNS = tuple(_NUMBER_COLUMNS.split())
TEXT_COLUMNS = tuple(_TEXT_COLUMNS.split())
VALUES = tuple(_VALUES.split())
