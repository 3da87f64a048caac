"""Model folders and checkpoints: written aside, published by one rename, verified when read."""
