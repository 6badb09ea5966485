-- Notes that a workload does not reach a server. One that two workloads do not reach within the time of a lease, with no
-- heartbeat between them, is marked as suspected until its next heartbeat, or until its lease has ended. Returns 1 if it was not before.
-- ARGV: server id, lease in ms, the workload.
if redis.call('HEXISTS', SERVERS, ARGV[1]) == 0 then return 0 end
local before = redis.call('GET', reporter_key(ARGV[1]))
redis.call('SET', reporter_key(ARGV[1]), ARGV[3], 'PX', ARGV[2])
if not before or before == ARGV[3] then return 0 end
if not redis.call('SET', suspect_key(ARGV[1]), '1', 'PX', ARGV[2], 'NX') then return 0 end
changed(ARGV[1], STATE)
return 1
