"""What can be bought, what it costs, and what models look like: data files with origin and date, and typed rows.

``tables/*.yaml`` and ``tables/prices.csv`` are for people to read and correct; ``rows`` turns them into values,
``offers`` joins them into what a plan chooses from.
"""
