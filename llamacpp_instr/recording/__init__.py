"""Recording: sessions of this process, and the files that they leave."""
