"""Causes: why a program has memory that it does not need, or needs less of. One rule a file, in
`causes.rules`.
"""
