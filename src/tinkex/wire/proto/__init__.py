"""Protobuf schemas and the code generated from them."""
