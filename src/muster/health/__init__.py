"""Is the hardware sound, who holds the others up, and why: parsers of what tools print, verdicts, analysers.

Nothing here measures, starts a program or imports torch: texts and typed values go in, findings come out.
"""
