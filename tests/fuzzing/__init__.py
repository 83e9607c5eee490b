"""Outside bytes against every reader: what may come out is a value, or an error that its contract names.

``targets`` says what is read, with samples that are right; ``mutation`` makes wrong ones of them. ``tools/fuzz.py``
runs any number of cases, ``tests/unit/test_fuzz.py`` some of them in CI.
"""
