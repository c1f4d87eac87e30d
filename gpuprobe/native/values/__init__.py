"""Values of tensors on the native engine, computed on the CPU over the device's memory."""
