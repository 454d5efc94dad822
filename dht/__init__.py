"""Identity, addresses, signed records, and the libp2p process under them. The only importer of hivemind."""
