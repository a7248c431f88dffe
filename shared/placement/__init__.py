"""Where every array lives: the strategy table, its layout on a mesh, and the traffic that it leads to."""
