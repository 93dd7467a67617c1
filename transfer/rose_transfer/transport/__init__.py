"""How objects of the store reach other processes and clusters: pulled, piece by piece, behind one interface.

    server = TcpServer(store.objects, token=token, waits=waits)     # or SharedMemoryServer(…, socket_path=…, spool=…)
    await server.start()
    server.announce(Announcement(version=7, key=manifest_key))

    client = TcpClient(host, port, token=token, waits=waits)        # or SharedMemoryClient(socket_path, …)
    newest = await client.watch(at_least=7, deadline_s=60)          # None: no news in time
    await client.fetch(newest.key, landing, deadline_s=10)          # MemoryLanding() or FileLanding(path)

| module | holds |
|---|---|
| `interface`, `landing` | what every transport does; where bytes are put |
| `tcp`, `shared_memory` | the transports: across networks; files handed over on one host |
| `carried`, `carrier` | transports within a cluster: TCP says what and when, the bytes cross on another path |
| `rdma`, `nixl_agent` | that path by RDMA, through NIXL; imported when used |
| `collective`, `nccl_collective`, `gloo_collective` | that path by pairs of GPUs, or of CPUs; imported when used |
| `frames`, `messages`, `auth` (pure) | the wire, what it says, and how both sides prove the token |
| `mismatch` (pure) | two ends that do not fit: TLS on one side, another token, a service of another kind |
| `server_session`, `client_session`, `client_asks` (pure) | who asks whom for what, and what becomes of a cut |
| `client_events`, `client_state`, `piece_list`, `token_bucket` (pure) | their parts |
| `serving`, `peer`, `doorstep` | asyncio and threads of a server: they move bytes and decide nothing |
| `fetching`, `dialed`, `lanes`, `link` | those of a client, and one connection of either |
| `access` | addresses and tokens as users name them |
| `fuzz` | damaged and hostile bytes against all that reads the network |
"""
