"""The frozen base model, and the parts that replace its attention, linear layers and output head."""
