"""What travels between a client and a server: types, their JSON and protobuf forms, dialects."""
