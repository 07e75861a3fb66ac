"""The SGLang adapter: proposers inside SGLang, as speculative algorithms of their own.

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm SPEC_SUFFIX

``SPEC_<NAME>`` takes a registered proposer, ``SPEC`` the one that the configuration names. The configuration
is in the environment variable ``SPEC_PLUGINS_CONFIG``: the path of a file, or JSON.
"""
