-- Removes a server at once. ARGV: server id, the caller's workload or ''.
-- Returns 1; 0 if the server is unknown; 3 if another workload registered it.
local entry = redis.call('HGET', SERVERS, ARGV[1])
if not entry then return 0 end
if is_anothers(ARGV[1], ARGV[2]) then return 3 end
remove(ARGV[1], entry)
changed(ARGV[1])
return 1
