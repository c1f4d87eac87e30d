"""The clocks of Python, as they were before the program could replace them in `time`: tests and
simulations do that. What runs while a program does uses these; the recorder imports them before.
"""

from time import monotonic as monotonic
from time import perf_counter as perf_counter
from time import perf_counter_ns as perf_counter_ns
from time import process_time as process_time
from time import sleep as sleep
from time import thread_time as thread_time
from time import time as time
from time import time_ns as time_ns
