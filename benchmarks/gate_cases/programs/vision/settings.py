"""What is trained, and how."""

BATCH = 16
MICRO = 4
RATE = 0.05
SIDE = 24
EPOCHS = 2
