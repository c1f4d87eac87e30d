"""`gpuprobe view`: recordings and memory snapshots on a screen."""
