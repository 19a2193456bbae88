"""The CNI plugin: from a runtime's environment and stdin to the daemon and back.

`protocol`, `environment`, `configuration`, `spec` and `result` are pure; `client`
and `verbs` talk to the daemon, or with `direct` and `spool` do without it; `log`
writes to a file, and `plugin` is the border to the process. Section numbers in these
modules are those of the CNI specification 1.1.0.
"""
