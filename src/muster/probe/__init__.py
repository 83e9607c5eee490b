"""The probe: a program that looks at one machine and says what it saw: JSON lines (``health.machine.report``).

Started as a process by argument list: ``python -P -m muster.probe.main``. What it looks at may hang (a driver, a disk,
a GPU): every measurement has a limit of its own, and the others are still reported. Only its loaded part
(``compute``) imports torch.
"""
