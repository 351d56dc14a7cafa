"""An optimizer's step in place, unit by unit: by a fused kernel where one knows the rules, else by definition."""
