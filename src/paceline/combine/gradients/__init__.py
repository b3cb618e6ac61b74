"""One mean gradient every step (``combine="gradients"``)."""
