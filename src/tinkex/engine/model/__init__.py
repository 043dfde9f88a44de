"""The frozen base model and the layers that replace its own."""
