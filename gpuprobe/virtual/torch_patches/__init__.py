"""What torch answers differently while a virtual GPU exists."""
