"""What is known of the machine: devices, readings that repeat, and diagnoses."""
