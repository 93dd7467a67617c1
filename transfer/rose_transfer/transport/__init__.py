"""How objects of the store reach other processes and clusters: pulled, piece by piece, behind one interface.

`interface` says what every transport does. `tcp` crosses networks, `shared_memory` hands over files on one host.
Underneath, `frames` is the wire, `server_session` and `client_session` decide, `link`, `serving` and `fetching` move
the bytes.
"""
