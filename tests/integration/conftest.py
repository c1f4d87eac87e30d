"""The sample project's own tests are the project's, not gpuprobe's."""

collect_ignore = ["sample_project"]
