"""One picture of the machine out of what each source reports."""
