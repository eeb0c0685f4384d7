"""Files that spread from machine to machine: the tree, partial files, the route of their pieces, and the copier."""
