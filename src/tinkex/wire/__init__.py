"""The Tinker protocol: message types, their JSON and protobuf encodings, limits, SDK versions."""
