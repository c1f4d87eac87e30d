"""Edits of realistic training programs, frozen before the gate learned to try causes.

Each case is a change as people commit it: several hunks in one to four files, of which one or two
need more memory, and the rest do not. ``truth.json`` has what `measure` found: the lines of each
hunk that is a cause, and how many bytes of the peak are saved if it is taken back.
"""
