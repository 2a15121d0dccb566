"""Where the price comes from. Each source says when its price was; nobody makes one up."""
