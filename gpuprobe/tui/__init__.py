"""The screens of `gpuprobe top` and `gpuprobe view`, made with Textual."""
