"""The ranks of a worker as processes of this host: the first one starts the others, tells them steps, and notices their
end."""
