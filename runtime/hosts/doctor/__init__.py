"""What this machine offers, what it lacks, and what to do about it.

`facts` says what can be known, `machine`, `transports` and `certificates` find it out, and `findings` judges it: a
function of the facts alone. `monarch doctor` (compiler/cli/doctor.py) puts them together and prints.
"""
