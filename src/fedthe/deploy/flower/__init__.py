"""Federation across machines, on Flower: the engines' one-client function on every client, the engines' server rule on
the server."""
