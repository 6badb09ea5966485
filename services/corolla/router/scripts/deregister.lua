-- Removes a server at once. ARGV: server id. Returns 1, or 0 when it was not there.
local entry = redis.call('HGET', SERVERS, ARGV[1])
if not entry then return 0 end
remove(ARGV[1], entry)
changed(ARGV[1])
return 1
