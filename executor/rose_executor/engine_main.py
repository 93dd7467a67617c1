"""An engine: vLLM's OpenAI-compatible server, with whatever plugins `VLLM_PLUGINS` names."""

from __future__ import annotations

from vllm.entrypoints.launchers.api_server.entry import main

if __name__ == "__main__":
    main()
