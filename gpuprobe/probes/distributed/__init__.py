"""`doctor --distributed`: measuring and judging the ranks of a job."""
