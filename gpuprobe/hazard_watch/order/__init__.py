"""What libraries synchronise automatically: the backward pass, collectives, other processes."""
