"""A baseline of a training run's memory, and what changed since.

A baseline keeps what a check compares (metrics, and the peak of each phase and kind of step) and
an account of each, so that a check can say what grew; the lines of an account sum to its amount.
As text it is small, and reviewed by people in pull requests.
"""
