"""The frozen base model, with replaced attention, linear layers and output head."""
