"""A prediction service over HTTP, for streams that adapt on a server."""
