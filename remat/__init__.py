"""remat: decide what a training step keeps, recomputes or moves off the device, and see why."""
