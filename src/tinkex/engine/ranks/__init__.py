"""One model over several processes, the ranks: each has a part of the weights, on its own GPU."""
