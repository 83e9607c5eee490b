"""Judgement before paying: will it fit, how fast, how long, how much, how likely, where, and what would be cheaper.

Pure: no clock, no files, no network; offers and the present moment are arguments.
"""

import sys

from muster import CallablePackage

sys.modules[__name__].__class__ = CallablePackage
