"""What the families of models share: plain functions, each standing once. `decoder` puts them together."""
