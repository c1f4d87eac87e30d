"""Programs, and changes of them: what `gpuprobe check` is measured on.

The cases were written and committed before the rules that they measure. They are data: what each
changes, and which lines a reader of the change would name as the cause.
"""
