"""Results as titled sections of sentences, facts and tables, built from typed data.

`gpuprobe.reporters.text`, `.markdown` and `.html` draw them.
"""
