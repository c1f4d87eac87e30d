"""What libraries order by themselves: the backward pass, collectives, other processes."""
