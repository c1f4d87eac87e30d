"""`doctor --distributed`: measuring and checking the ranks of a job."""
