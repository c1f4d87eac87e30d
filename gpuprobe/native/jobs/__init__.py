"""One rank of a job, alone: the other ranks have no processes, and the simulated GPU answers for
them.
"""
