"""What reports say, once: titled sections of sentences, facts and tables, made from typed data.

`gpuprobe.reporters.text`, `.markdown` and `.html` draw them.
"""
