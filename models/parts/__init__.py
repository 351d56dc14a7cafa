"""Plain functions that the families of models share. `decoder` combines them."""
