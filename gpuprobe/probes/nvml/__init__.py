"""The NVML source: devices, topology, repeated readings."""
